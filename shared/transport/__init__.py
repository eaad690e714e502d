"""What both ends of the transports within one machine or process agree on."""

SCHEME = "ipc://"  # of executors on this machine
