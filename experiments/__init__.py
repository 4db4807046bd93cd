"""Commands: train, quickstart, sweep, audit, and the studies."""
