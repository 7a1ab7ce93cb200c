"""Variables in shards on the devices of a mesh, gathered where they are used."""
