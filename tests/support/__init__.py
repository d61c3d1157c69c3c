"""What the tests share: a tiny real target, drafters that know too much, a hub on loopback."""
