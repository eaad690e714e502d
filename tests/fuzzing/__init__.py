"""Fuzzing of whatever reads bytes that a peer, or somebody else, has made: `python -m fuzzing`.

`targets` has one function for each reader, `mutation` changes inputs, `oracle` tells what is a finding,
`campaign` runs a target under Atheris (libFuzzer for Python), and `corpus` holds the inputs that are kept:
small ones that reach different lines, and one for each finding (`FINDINGS.md`).
"""
