"""The parts every Transformer is made of.

Reading order: layers, layout, norm, positions, masks, kernels, cache, attention, feedforward, block, embeddings, heads,
stack; and quantized, for layers in few bits.

Letters in shape comments:
    B batch    T tokens in a row    S tokens of the source, or slots of a cache    N tokens of a packed batch
    D d_model  F d_ff               H heads, K of them key-value heads             E width of one head    V vocabulary
"""
