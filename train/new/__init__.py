"""`megadit new`: a training run proposed for a folder of videos or images."""
