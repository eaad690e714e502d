"""Workers: processes that hold a share of the weights, each a lane of the engine."""
