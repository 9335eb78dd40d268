"""Tasks of every kind of the harness, on small data of our own that needs no network."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

WORDS = [
    "return", "self", "import", "value", "range", "class", "index", "encode", "string", "yield",
    "print", "list", "name",
]  # fmt: skip

KINDS: dict[str, dict[str, Any]] = {
    # answers of several tokens, some of which begin others; examples before the question
    "own_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
            {"metric": "acc_mutual_info", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    # as MMLU: the answer is a letter, and all questions have the same examples
    "own_exam": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\n"
        "D. {{choices[3]}}\nAnswer:",
        "doc_to_choice": ["A", "B", "C", "D"],
        "doc_to_target": "{{answer}}",
        "fewshot_config": {"sampler": "first_n"},
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    # as Winogrande: the same end after different beginnings
    "own_schema": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{answer}}",
        "doc_to_choice": "{{beginnings}}",
        "doc_to_target": "{{target}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "own_continuation": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1] | join(' ')}}",
        "doc_to_target": "{{' ' + text.split(' ')[-1]}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    "own_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "word_perplexity"},
            {"metric": "byte_perplexity"},
            {"metric": "bits_per_byte"},
        ],
    },
    "own_answer": {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "Question:"], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_tasks(folder: Path, num_documents: int = 12, text_words: int = 30) -> Path:
    """Definitions in `folder`, and their data next to them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(11)
    files = {}
    for split, count in (("validation", num_documents), ("train", 8)):
        files[split] = str(folder / f"{split}.jsonl")
        records = [document(draw, text_words) for _ in range(count)]
        Path(files[split]).write_text("".join(json.dumps(one) + "\n" for one in records))
    for name, kind in KINDS.items():
        definition = {
            "task": name,
            "tag": ["own_tasks"],
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "validation_split": "validation",
            "fewshot_split": "train",
            "metadata": {"version": 1.0},
            **kind,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(definition))
    group = {"group": "own_group", "task": ["own_choice", "own_answer"]}
    (folder / "group.yaml").write_text(yaml.safe_dump(group))
    return folder


def document(draw: random.Random, text_words: int) -> dict[str, Any]:
    def some(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    choices = [some(draw.randint(1, 4)) for _ in range(3)]
    choices.append(f"{choices[0]} {some(1)}")
    question = some(draw.randint(4, 12))
    return {
        "question": question,
        "choices": choices,
        "beginnings": [f"{question} {choice}" for choice in choices],
        "answer": draw.randrange(4),
        "target": some(2),
        "text": some(draw.randint(3, text_words)),
    }
