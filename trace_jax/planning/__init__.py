"""What a run would take on chips that are not here: bytes, collectives and time a device."""
