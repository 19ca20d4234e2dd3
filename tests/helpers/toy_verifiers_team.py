"""An env for verifiers with two agents: a guide names a word that only it observes, a walker repeats it."""

import verifiers.v1 as vf

__all__ = ["Pair"]


class PairConfig(vf.EnvConfig):
    guide: vf.AgentConfig = vf.AgentConfig()
    walker: vf.AgentConfig = vf.AgentConfig()


class Pair(vf.Env[PairConfig]):
    async def run(self, task, agents):
        hints = await agents.guide.run(task)
        walk = type(task)(task.data.model_copy(update={"prompt": None}), task.config)
        async with agents.walker.interaction(walk) as walker:
            await walker.turn("are you there?")
            await walker.turn(f"repeat {hints.last_reply}")
