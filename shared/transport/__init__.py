"""Constants and formats of both ends of the transports within one machine or process."""

SCHEME = "ipc://"  # of executors on this machine
