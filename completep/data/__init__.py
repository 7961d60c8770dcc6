"""Text in, memory-mapped token shards and reproducible batches out.

Preparing: `prepare` finds its sources, cuts them into units of work, tokenizes the units in a pool of processes, and
writes a corpus: a folder with shards and a manifest. Training: `load_corpus` opens the folder, `Sampler` reads batches.

In reading order:

    tokenizer.py   text → ids and back: bytes, gpt2 or a tokenizer.json
    sources.py     files, folders, hf:…, python and torch → pieces of input → units of work
    parquet.py     the rows of a parquet file, read in limited memory
    documents.py   a piece of input → its documents
    shards.py      ids → shard files
    corpus.py      the manifest and the shards on disk, checked when they are opened
    prepare.py     all of the above: sources → corpus, restartable
    builtin.py     the source code of Python or torch as a corpus, made once and cached
    sampler.py     (seed, step) → the tokens of a batch
"""
