"""Two agents of smolagents: a caller whose every answer must be a call, and a checker that writes code in a schema.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/frameworks/smolagents_team.py
"""

from census import Census, main, number_in
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

# smolagents' own prompts are longer than the context of a base that fits on a laptop.
FINAL = {"pre_messages": "math reasoner", "post_messages": "{{task}}"}
PROMPTS = {
    "planning": {"initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": ""},
    "managed_agent": {"task": "{{task}}", "report": "{{final_answer}}"},
    "final_answer": FINAL,
}


def solve(census: Census) -> int | None:
    @tool
    def search(query: str) -> str:
        """Looks up how many people live in a place.

        Args:
            query: the place
        """
        return census.search(query)

    @tool
    def calculator(expression: str) -> str:
        """Adds or subtracts two numbers, as in 581 - 323.

        Args:
            expression: the two numbers, and the sign between them
        """
        return census.calculator(expression)

    caller = ToolCallingAgent(
        [search, calculator],
        OpenAIModel("caller"),
        prompt_templates=PROMPTS | {"system_prompt": "tools agent"},
        max_steps=4,
        stream_outputs=True,
        verbosity_level=0,
    )
    caller.run(census.question)
    model = OpenAIModel("checker")
    checker = CodeAgent(
        [],
        model,
        prompt_templates=PROMPTS | {"system_prompt": "math reasoner"},
        max_steps=2,
        use_structured_outputs_internally=True,
        verbosity_level=0,
    )
    answer = number_in(str(checker.run(census.to_check())))
    if answer is not None:
        return answer
    asked = [{"role": "system", "content": "math reasoner"}, {"role": "user", "content": census.to_check()}]
    return number_in(str(model.generate(asked).content))  # then a plain number will do


if __name__ == "__main__":
    main(solve)
