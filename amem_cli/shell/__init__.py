"""The command line itself: options, config, input, output, signals, errors, completion."""
