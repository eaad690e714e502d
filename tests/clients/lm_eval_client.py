"""lm-eval against a gateway and against transformers here; prints the log-likelihoods of both as JSON.

python lm_eval_client.py URL KEY MODEL_FOLDER WORK_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
url, os.environ["OPENAI_API_KEY"], model, work = sys.argv[1:]

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

QUESTIONS = [
    {
        "question": "And in the beginning God created the",
        "choices": [" heaven", " goat", " LORD"],
        "answer": 0,
    },
    {"question": "Seen: a dog, owner Mr", "choices": [" Rivers. Will not eat.", " and the the"], "answer": 0},
    {"question": "The king said unto", "choices": [" him", " me, I will", " a"], "answer": 1},
]
folder = Path(work)
(folder / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
(folder / "notes.yaml").write_text(
    f"""task: notes
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
)
tasks = TaskManager(include_path=str(folder), include_defaults=False)


def likelihoods(kind: str, **arguments: object) -> list[float]:
    found = simple_evaluate(
        kind, model_args=arguments, tasks=["notes"], task_manager=tasks, bootstrap_iters=0
    )
    return [float(answer[0]) for each in found["samples"]["notes"] for answer in each["filtered_resps"]]


there = likelihoods(
    "local-completions",
    model="base",
    base_url=f"{url}/v1/completions",
    tokenizer=model,
    tokenizer_backend="huggingface",
    num_concurrent=4,
)
# The other asks with tokens, and without one for the beginning of a text.
here = likelihoods("hf", pretrained=model, dtype="float32", device="cpu", add_bos_token=False)
print(json.dumps({"gateway": there, "transformers": here}))
