"""From the model to pixels, by Mitsuba."""
