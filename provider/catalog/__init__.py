"""The groups, parameters and files of a checkpoint, as an executor serves them."""
