"""NPUs: each vendor's stack behind one protocol, in a process of its own, with the CPU behind it."""
