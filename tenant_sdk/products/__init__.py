"""Products of frozen layers: hidden, sent, checked, and floats again."""
