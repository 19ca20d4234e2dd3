"""Writes the data that recipes of the cookbook read: invented rows, with the columns of the published datasets.

Datasets of the Hub go to the cache of Hugging Face's `datasets` in HF_HOME, where `load_dataset` finds them offline;
files that a recipe reads from the working folder go to the folder that is this program's argument."""

import csv
import json
import os
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.json.json import Json

ROWS = 256  # of each split


def talk(number):
    return [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": f"{number}"}]


def dialogue(number, answer):
    return f"\n\nHuman: say {number}\n\nAssistant: {answer}"


def chemistry(number):
    choices = {"label": ["A", "B"], "text": [f"{number}", "none"]}
    question = {"question": f"how many protons has element {number}?", "choices": choices, "answerKey": "A"}
    return question | {"domain": "Chemistry", "type": "mcq-2-choices", "details": {"level": "L3"}}


def feedback(number):
    row = {"orig_instruction": f"say {number}", "orig_criteria": "is it said?", "orig_reference_answer": f"{number}"}
    return row | {f"orig_score{score}_description": f"{score} of 5" for score in range(1, 6)}


# name, config -> splits, and a row by its number
DATASETS = {
    ("openai/gsm8k", "main"): (
        ("train", "test"),
        lambda n: {"question": f"What is {n} + 1?", "answer": f"One more is {n + 1}.\n#### {n + 1}"},
    ),
    ("HuggingFaceH4/no_robots", "default"): (("train", "test"), lambda n: {"messages": talk(n)}),
    ("allenai/tulu-3-sft-mixture", "default"): (("train",), lambda n: {"messages": talk(n)}),
    ("Anthropic/hh-rlhf", "default"): (
        ("train", "test"),
        lambda n: {"chosen": dialogue(n, f"{n}"), "rejected": dialogue(n, "no")},
    ),
    ("zwhe99/DeepMath-103K", "default"): (
        ("train",),
        lambda n: {"question": f"{n} + 1 = ?", "final_answer": f"{n + 1}"},
    ),
    ("hicai-zju/SciKnowEval", "default"): (("test",), chemistry),
    ("HuggingFaceH4/MATH-500", "default"): (
        ("test",),
        lambda n: {"problem": f"{n} + 1 = ?", "solution": f"It is $\\boxed{{{n + 1}}}$.", "answer": f"{n + 1}"},
    ),
    ("prometheus-eval/Feedback-Collection", "default"): (("train",), feedback),
    ("Salesforce/wikitext", "wikitext-103-raw-v1"): (
        ("train",),
        lambda n: {
            "text": f"On day {n} they went there and did not come back until the time had come, after all. " * 8
        },
    ),
}


def market(number):
    """A row of Prophet Arena's table: half of the markets are before the date that parts training from validation."""
    month = "09" if number % 2 else "11"
    sources = [{"title": "news", "summary": f"the count stands at {number}", "ranking": 1}]
    row = {"submission_id": f"{number}", "event_ticker": f"E{number}", "title": f"will it pass {number}?"}
    row |= {"snapshot_time": f"2025-{month}-01T00:00:00Z", "close_time": f"2025-{month}-09T00:00:00Z"}
    row |= {"markets": json.dumps(["it passes"]), "market_outcome": json.dumps({"it passes": number // 2 % 2})}
    return row | {"category": "counts", "sources": json.dumps(sources)}


def write_files(folder):
    """Writes the files of the working folder."""
    sentences = folder / "tinker_cookbook" / "example_data" / "multilingual.txt"
    sentences.parent.mkdir(parents=True)
    sentences.write_text("The house is old.\nLa casa es vieja.\n")
    with (folder / "markets.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(market(0)))
        table.writeheader()
        table.writerows(map(market, range(16)))
    trained = [{"messages": talk(n), "output_text": "<answer>A</answer>"} for n in range(16)]
    asked = [{"prompt": talk(n)[:1], "answer": "A"} for n in range(2)]
    save(folder, "science_data", trained, asked)
    call = [{"Action": "say", "Action_Input": "{}"}]
    trained = [{"prompt": f"say {n}", "golden_response": ["Action: say"]} for n in range(16)]
    save(folder, "tooluse_data", trained, [{"prompt": "say 1", "golden_answer": call}] * 2)


def save(folder, name, trained, asked):
    for part, rows in (("train_data", trained), ("eval_data", asked)):
        Dataset.from_list(rows).save_to_disk(str(folder / name / part))


def write_rows(folder, split, row):
    path = Path(folder) / f"{split}.jsonl"
    path.write_text("".join(f"{json.dumps(row(number))}\n" for number in range(ROWS)))
    return [str(path)]


def main():
    write_files(Path(sys.argv[1]))
    for (repo, config), (splits, row) in DATASETS.items():
        with tempfile.TemporaryDirectory() as folder:
            files = {split: write_rows(folder, split, row) for split in splits}
            owner, name = repo.split("/")
            builder = Json(cache_dir=folder, dataset_name=name, config_name=config, data_files=files)
            known_as = f"{owner}___{camelcase_to_snakecase(name)}"
            builder.download_and_prepare(f"{os.environ['HF_HOME']}/datasets/{known_as}/{config}/0.0.0/{'0' * 40}")


main()
