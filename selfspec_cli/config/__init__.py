"""What a run is: the schema, the words that users type, the rules that they must keep, and the keys of points."""
