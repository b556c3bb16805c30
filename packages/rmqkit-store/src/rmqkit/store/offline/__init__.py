"""Tools for the files of a stopped broker: view, verify, rebuild, repair."""
