import * as pysync from "../client/pysync.js"

window.pysync = pysync
