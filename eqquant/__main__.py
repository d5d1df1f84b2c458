"""`python -m eqquant`: the command line."""

from eqquant_cli.main import main


if __name__ == "__main__":
    main()
