"""Options, output and connections that commands share."""
