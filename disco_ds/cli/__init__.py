"""The commands, one thin file each: options in, one call, words out."""
