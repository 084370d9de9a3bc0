"""The measures behind :func:`disco_ds.evaluate.evaluate`: retrieval, zero-shot classification, and the ranks' sums."""
