"""Long sequences in bounded memory: the tensors that are kept, their places, and recomputation."""
