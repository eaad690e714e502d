"""Deterministic simulation: both ends of the protocol on a simulated network and clock.

One seed is one run, and a run is the same wherever and whenever it is repeated.

``kernel``      time, events and tasks, of which one runs at a time
``substitutes`` puts the kernel's clock, threads, locks and random numbers into the modules that use real ones
``network``     sockets between parties, which delay, cut, lose and damage bytes
``model``       weights of small groups, and what their products must be
``executors``   provider and mask sources: the real executor above the socket
``tenants``     the real session's products above the socket, and the requests that a tenant makes
``invariants``  what must hold after every step and at the end of a run
``world``       draws a world and its faults from a seed, and runs it
"""
