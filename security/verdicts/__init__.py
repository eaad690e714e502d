"""The size of an audit, scores with intervals, and the verdict on each claim."""
