"""edge_rt as a service of systemd: its units, putting them in place, and what systemd says of them."""
