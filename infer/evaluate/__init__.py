"""How good videos are: figures with intervals, under a protocol that is written down."""
