"""The recipes of tinker-cookbook 0.6.1, as data: how each is started for a few steps, and what shows that it ran; or
why it is not run here, and what it says when it is started."""

from dataclasses import dataclass

LOG = "log_path={log} "
FRESH = LOG + "behavior_if_log_dir_exists=delete "
MODEL = "model_name=Qwen/Qwen3.5-4B "
SMALL = "group_size=2 max_tokens=8 eval_every=0 "
NAMED = "loss_fn=importance_sampling "  # in place of `stable_reinforce`, whose formula is not public
REWARD = "env/all/reward/total"
NLL = "train_mean_nll"
GSM8K = "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder "
GSM8K += "dataset_builder.batch_size=2 dataset_builder.group_size=2 dataset_builder.renderer_name=qwen3_5 "
GSM8K += "dataset_builder.model_name_for_tokenizer=Qwen/Qwen3.5-4B "


@dataclass(frozen=True)
class Ran:
    """A recipe that runs. `metric` is logged at each of `steps` steps; a recipe without a log of its own prints
    `words`, a regular expression. `typed` is what a person types, `first` the recipe that makes its data."""

    flags: str
    metric: str = ""
    steps: int = 1
    words: str = ""
    typed: str = ""
    first: str = ""


@dataclass(frozen=True)
class NotRun:
    """Recipes that need what a test has not. `program`, one of them, ends with `words`, a regular expression."""

    reason: str
    program: str
    words: str
    flags: str = ""


RECIPES: dict[str, Ran | NotRun] = {
    "audio": NotRun("audio", "audio.asr.sl_train", 'no base "thinkingmachines/Inkling"'),
    "chat_sl.sweep": Ran(
        "recipe=sft base.model_name=Qwen/Qwen3.5-4B base.batch_size=4 base.eval_every=0 training_budget_examples=8 "
        "learning_rates=[1e-4] lora_ranks=[4]",
        words="Best config per rank",
    ),
    "chat_sl.train": Ran(
        FRESH + MODEL + "dataset=no_robots batch_size=4 eval_every=0 infrequent_eval_every=0 max_steps=2", NLL, 2
    ),
    "code_rl": NotRun(
        "a dataset of the Hub, and a sandbox's server for programs", "code_rl.train", "Couldn't reach", FRESH + MODEL
    ),
    "decisions.demo": Ran("--model_name=Qwen/Qwen3.5-4B", words='"billing": 0\\.[0-9]+', typed="How do I sign in?\n"),
    "decisions.forecasting": Ran(FRESH + MODEL + "data_path=markets.csv batch_size=4 max_steps=1", "test/brier_reward"),
    "distillation.off_policy_reasoning": NotRun(
        "a dataset that it streams from the Hub",
        "distillation.off_policy_reasoning",
        "Couldn't reach 'open-thoughts",
        FRESH + MODEL + "batch_size=4 max_steps=1",
    ),
    "distillation.on_policy_distillation": Ran(
        FRESH + MODEL + SMALL + "teacher_model=Qwen/Qwen3.5-9B groups_per_batch=2 max_steps=2", "teacher_kl", 2
    ),
    "distillation.on_policy_distillation_harbor_multi_turn": NotRun(
        "Modal's sandboxes, which are paid",
        "distillation.on_policy_distillation_harbor_multi_turn",
        "modal is required",
    ),
    "distillation.on_policy_multi_teacher": Ran(
        FRESH + MODEL + SMALL + "deepmath_teacher_model=Qwen/Qwen3.5-9B tulu3_teacher_model=Qwen/Qwen3.5-9B "
        "deepmath_groups_per_batch=2 tulu3_groups_per_batch=2 max_steps=2",
        "teacher_kl",
        2,
    ),
    "forecasting.data": NotRun("a download from the Hub", "forecasting.data", "urlopen error"),
    "forecasting.train": Ran(
        FRESH + MODEL + SMALL + "renderer_name=qwen3_5 data_path=markets.csv groups_per_batch=2 "
        "validation_group_size=1 max_steps=1",
        REWARD,
    ),
    "harbor_rl": NotRun(
        "Modal's sandboxes, which are paid", "harbor_rl.scripts.train_terminal_bench", "modal is required"
    ),
    "math_rl.train": Ran(FRESH + MODEL + SMALL + NAMED + "env=gsm8k groups_per_batch=2 max_steps=1", REWARD),
    "multiplayer_rl.guess_number.train": Ran(
        FRESH + MODEL + SMALL + "renderer_name=role_colon batch_size=2 max_steps=2", REWARD, 2
    ),
    "multiplayer_rl.text_arena.play": NotRun(
        "a person who plays against a checkpoint", "multiplayer_rl.text_arena.play", "Missing required .*checkpoint"
    ),
    "multiplayer_rl.text_arena.train": Ran(
        FRESH + MODEL + "batch_size=8 num_train_datapoints=16 num_test_datapoints=4 max_tokens=8 max_steps=2 "
        "test_opponent=random eval_every=1 save_every=0",
        REWARD,
        2,
    ),
    "multiplayer_rl.twenty_questions.train": Ran(
        FRESH + MODEL + "renderer_name=role_colon batch_size=1 group_size=2 num_epochs=1 max_steps=1 eval_every=0",
        "env/all/turns_per_episode",
    ),
    "preference.dpo.train": Ran(FRESH + MODEL + "batch_size=4 max_steps=2", "dpo_loss", 2),
    "preference.rlhf.rlhf_pipeline": Ran(
        "base_model=Qwen/Qwen3.5-4B batch_size=4 rl_max_tokens=8 rl_group_size=2 max_steps=1 eval_every=0",
        words="(?s)(Training completed successfully.*){3}",
    ),
    "preference.shorter.train": Ran(
        FRESH + MODEL + "batch_size=4 group_size=4 max_tokens=16 max_steps=2 eval_every=0", "kl_pre_post_v1", 2
    ),
    "prompt_distillation.create_data": Ran("output_file={log}/data.jsonl", words="Saved data to"),
    "prompt_distillation.train": Ran(
        FRESH + MODEL + "file_path={package}/example_data/conversations.jsonl batch_size=4 max_steps=2 eval_every=0",
        NLL,
        2,
    ),
    "rl_basic": Ran(LOG + MODEL + NAMED + GSM8K + "max_tokens=8 max_steps=1", REWARD),
    "rl_loop": Ran(LOG + MODEL + NAMED + "batch_size=2 group_size=2 max_tokens=8 max_steps=2", "reward/total", 2),
    "rl_numerics_check.train": Ran(
        FRESH + MODEL + SMALL + "groups_per_batch=1 max_steps=1 task.page_chars=200 task.num_pages_min=1 "
        "task.num_pages_max=2 max_trajectory_tokens=1900",
        REWARD,
    ),
    "rubric.debug_env": Ran("", words="Extracted Score: 0"),
    "rubric.generate_data": Ran("", words="Generated test dataset"),
    "rubric.prometheus_experimental": Ran(
        FRESH + MODEL + NAMED + "groups_per_batch=2 train_group_size=2 max_tokens=8 max_steps=1 eval_every=0", REWARD
    ),
    "rubric.train": Ran(
        FRESH + MODEL + NAMED + "groups_per_batch=2 train_group_size=2 max_tokens=8 max_steps=1 eval_every=0",
        REWARD,
        first="rubric.generate_data",
    ),
    "sdft.benchmark": Ran(
        MODEL + "behavior_if_log_dir_exists=delete data_dir=. log_root={log} max_tokens=8 groups_per_batch=2 "
        "max_steps=1 sft_batch_size=4 sft_max_steps=1 eval_every=0",
        words="Saved summary to",
    ),
    "sdft.run_continual_learning": Ran(
        MODEL + "data_dir=. log_root={log} batch_size=4 max_tokens=8 learning_rates=1e-4", words="EXPERIMENT COMPLETE"
    ),
    "sdft.train": Ran(FRESH + MODEL + "groups_per_batch=2 max_tokens=8 max_steps=2 eval_every=0", REWARD, 2),
    "search_tool": NotRun(
        "a Chroma server with Wikipedia, and Gemini's embeddings, which are paid",
        "search_tool.train",
        "No module named 'chromadb'",
    ),
    "sl_basic": Ran(LOG + MODEL + "max_steps=2", NLL, 2),
    "sl_loop": Ran(LOG + MODEL + "batch_size=4 max_steps=2", NLL, 2),
    "true_thinking_score.analyze": Ran(MODEL + "dataset=gsm8k n_problems=2 max_tokens=256", words="Problems: 2/2"),
    "true_thinking_score.run_small_experiment": Ran("", words="Total steps analyzed: [1-9]"),
    "verifiers_rl": NotRun(
        "verifiers 0.1.9 and environments of a hub", "verifiers_rl.train", "No module named 'verifiers'"
    ),
    "vlm_classifier": NotRun(
        "images", "vlm_classifier.train", "image processor", MODEL + "experiment_dir={log} renderer_name=qwen3_vl"
    ),
}
ON_SMOLLM2 = ("prompt_distillation.create_data", "sl_loop")  # these run on SmolLM2-135M too
