"""Trained runs in, results for other tools out: Hugging Face folders, lm-evaluation-harness scores, trackers.

In reading order:

    runs.py          a run's folder → the trained model and its tokenizer
    huggingface.py   model and tokenizer → a folder that transformers can load
    scoring.py       model and token ids → log-likelihoods, batched with shared prefixes
    harness.py       the lm-evaluation-harness on top of scoring: accuracies, stored in the run's folder
    compare.py       `evaluate`: several runs side by side, as a result
    trackers.py      metrics → TensorBoard, Weights & Biases or trackio, while a run is training
"""
