"""What the parameters of any PyTorch model are, found by running a small copy of it.

In: a model that can be run (the specimen) and example inputs for it. Out: an `Anatomy`, which names the role of every
parameter, the places where a multiplier acts, and the axes that give each parameter its size ratios. An anatomy uses
templates, names with the number of the block replaced by `*`, so it also holds for larger models of the same class.

The pipeline is trace → blocks → roles → proof → ratios. The files, in reading order:

    names.py      names of parameters and modules without those that wrappers add
    kinds.py      kinds of modules that are known by their class: linear, convolution
    calls.py      one call of a module, to repeat it on another input
    norms.py      norms, known by what they do; their gains and biases
    contractions.py  which axes of a bare parameter its products sum over, and how many matrices it stacks
    trace.py      one forward pass, recorded: which module made which node of the autograd graph
    blocks.py     the stacks of repeated blocks, templates, and models that no rule covers
    stream.py     the residual stream as a sum: the walk from the last block down to the embeddings
    readouts.py   the matrices that make the results, and what stands between each of them and the stream
    dissect.py    all of that for one specimen
    roles.py      `Anatomy`; the role of each parameter, from its module and its place in the stream
    modes.py      training mode without dropout
    proof.py      the check on numbers that the roles are right
    specimen.py   which model is examined: yours, the base, or a small one that you pass; reduced copies; example inputs
    examine.py    a specimen → its anatomy: all of the above in order
    ratios.py     m_N, m_out and m_L of each parameter
    heads.py      the scale on q·k in every attention, measured
    forward.py    the factors that a forward pass already contains, measured

This package imports `rules.table` and nothing else from `rules`.
"""
