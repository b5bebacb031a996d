"""`python -m ibp` is the command `ibp`."""

from ._cli.main import program

if __name__ == "__main__":
    program()
