"""Foreign producers and consumers of DLPack and Arrow, valid and invalid ones."""
