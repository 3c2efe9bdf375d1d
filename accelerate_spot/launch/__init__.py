"""`accelerate-spot launch`: accelerate's own launcher and configuration, with the run's flag in it."""
