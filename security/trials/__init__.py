"""Every attack where it belongs: on recordings, by hostile parties, each scored beside its control."""
