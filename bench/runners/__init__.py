"""One runner per peer, each a process of its own; ``protocol`` says what they all answer to."""
