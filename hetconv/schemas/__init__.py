"""Schemas of plan and profile files, and the data sheets of devices and links."""
