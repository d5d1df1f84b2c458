"""The command line. It uses public names of `eqquant` only, and imports it no sooner than a command needs it."""
