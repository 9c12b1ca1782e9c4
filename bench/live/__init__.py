"""`updraft bench live`: routing between a real local model and a stub cloud that knows the answers to 300 questions."""
