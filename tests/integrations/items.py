"""A few items for each of the paper's tasks, with the fields of the official data sets."""

import json
from pathlib import Path

ITEMS = {
    "hellaswag": [
        {
            "ind": i, "activity_label": "Baking bread", "ctx_a": "A man kneads dough on a table.", "ctx_b": "he",
            "ctx": "A man kneads dough on a table. he", "label": "01130"[i],
            "endings": [
                "puts it into the oven.", "throws it [title] at the moon.", "reads it a story.", "swims across it.",
            ],
            "source_id": "own", "split": "val", "split_type": "indomain",
        }
        for i in range(5)
    ],
    "arc_easy": [
        {"id": f"q{i}", "question": q, "choices": {"text": c, "label": ["A", "B", "C", "D"]}, "answerKey": "ABCD"[a]}
        for i, (q, c, a) in enumerate(
            [
                ("What falls from clouds?", ["rain", "stones", "music", "bread"], 0),
                ("Which animal lays eggs?", ["dog", "hen", "cow", "cat"], 1),
                ("What do plants need to grow?", ["noise", "plastic", "light", "salt"], 2),
            ]
        )
    ],
    "lambada_openai": [
        {"text": "She opened the door and he came through the door"},
        {"text": "The king spoke to the queen and then left with the queen"},
    ],
    "race": [
        {
            "article": "Tom lives by the sea. Every day he swims before school.",
            "problems": str(
                [
                    {
                        "question": "Where does Tom live?", "answer": "B",
                        "options": ["In a city", "By the sea", "On a hill", "In a tree"],
                    },
                    {
                        "question": "Before school Tom  _  .", "answer": "A",
                        "options": ["swims", "sleeps", "sings", "reads"],
                    },
                ]
            ),
        }
    ] * 2,
    "piqa": [
        {"goal": "To open a jar,", "sol1": "turn its lid.", "sol2": "sing to its lid.", "label": 0},
        {"goal": "To cool soup,", "sol1": "light a fire under it.", "sol2": "wait a while.", "label": 1},
    ],
    "boolq": [
        {"passage": "Iron is a metal. It rusts in water.", "question": "is iron a metal", "label": 1, "idx": 0},
        {"passage": "Whales live in the sea.", "question": "do whales live on land", "label": 0, "idx": 1},
    ],
}  # fmt: skip


def write_items(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for task, items in ITEMS.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
    return folder
