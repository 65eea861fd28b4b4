"""offbeat inside the training loops of others: Lightning, Accelerate, the Trainer of transformers.

Each module here imports its framework, and is imported by name; `docs/frameworks.md` says how.
"""
