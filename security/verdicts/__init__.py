"""How much an audit does, scores with intervals, and what becomes of each claim."""
