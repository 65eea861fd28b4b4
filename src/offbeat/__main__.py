"""`python -m offbeat`: the offbeat command, where torchrun wants a module to start."""

from offbeat.cli import app

if __name__ == "__main__":
    app(prog_name="offbeat")
