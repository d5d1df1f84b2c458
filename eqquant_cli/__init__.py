"""The command line. It uses public names of `eqquant` and its tables, and imports them when a command needs them."""
