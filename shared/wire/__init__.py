"""Bytes on the wire: headers, typed messages, the protocol's states, frames. No I/O."""
