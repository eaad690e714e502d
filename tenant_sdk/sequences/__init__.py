"""Long sequences in bounded memory: what of them is kept, where it lies, and what is made again."""
