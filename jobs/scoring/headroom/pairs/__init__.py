"""The predictions of an image–text model: settings, galleries, and measuring images and captions in them."""
