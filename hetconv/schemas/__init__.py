"""Plan and profile files, and the data sheets of devices and links."""
