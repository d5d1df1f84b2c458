"""The command line. It uses public names, tables and files of `eqquant`, and imports them when a command runs."""
