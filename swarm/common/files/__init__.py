"""Files and folders: replaced in one go, checked before they are believed."""
