"use strict";

const scene = JSON.parse(document.getElementById("scene").textContent);
const canvas = document.querySelector("canvas");
const message = document.getElementById("message");
const bar = document.querySelector("progress");
const FORMATS = {
  R8UI: ["RED_INTEGER", "UNSIGNED_BYTE", Uint8Array],
  R32I: ["RED_INTEGER", "INT", Int32Array],
  R16F: ["RED", "HALF_FLOAT", Uint16Array],
  RGBA8: ["RGBA", "UNSIGNED_BYTE", Uint8Array],
  RGBA32F: ["RGBA", "FLOAT", Float32Array],
};
const INTERPOLATED = ["R16F", "RGBA8"];
const SIDE = 8; // vertices of a block along each axis
const MOBILE = 2 ** 28; // bytes of blocks for which phones and tablets have room; the others stay coarse
const VERTEX_SHADER = `#version 300 es
void main() { gl_Position = vec4(vec2(gl_VertexID % 2, gl_VertexID / 2) * 4.0 - 1.0, 0.0, 1.0); }`;
const PRECISIONS = ["float", "int", "sampler3D", "isampler3D", "usampler3D"].map((type) => `precision highp ${type};\n`);

// Drawing

const gl = canvas.getContext("webgl2", { alpha: false, antialias: false, powerPreference: "high-performance" });
let uniforms = null;

// Decodes base64; fetching data: addresses would take five times as long.
function decode(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; ++i) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

const wait = (milliseconds) => new Promise((resume) => setTimeout(resume, milliseconds));

// Returns the next part of an array in the page, null after the last one. The page may still be arriving: a part is
// complete once something follows it.
async function nextPart(name) {
  for (;;) {
    const part = document.querySelector("script[data-array]");
    if (part && part.dataset.array !== name) return null;
    if ((part && part.nextElementSibling) || document.readyState !== "loading") return part;
    await wait(20);
  }
}

// Returns the content of an array, which is in a file beside the page or in parts in the page, compressed by zlib.
async function load({ name, file }) {
  const blobs = [];
  for (let part; !file && (part = await nextPart(name)); ) {
    const bytes = decode(part.textContent);
    blobs.push(new Blob([bytes]));
    bar.value += bytes.length;
    part.remove();
    await wait(0); // so that the bar is drawn
  }
  if (file) {
    const response = await fetch(file);
    if (!response.ok) throw new Error(`${file}: ${response.status} ${response.statusText}`);
    const transform = (chunk, controller) => {
      bar.value += chunk.length;
      controller.enqueue(chunk);
    };
    blobs.push(await new Response(response.body.pipeThrough(new TransformStream({ transform }))).blob());
  }
  const stream = new Blob(blobs).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function addTexture(unit, { name, format, shape }) {
  const [depth, height, width] = shape;
  const filter = INTERPOLATED.includes(format) ? gl.LINEAR : gl.NEAREST;
  gl.activeTexture(gl.TEXTURE0 + unit);
  gl.bindTexture(gl.TEXTURE_3D, gl.createTexture());
  for (const key of ["MIN", "MAG"]) gl.texParameteri(gl.TEXTURE_3D, gl[`TEXTURE_${key}_FILTER`], filter);
  for (const key of ["S", "T", "R"]) gl.texParameteri(gl.TEXTURE_3D, gl[`TEXTURE_WRAP_${key}`], gl.CLAMP_TO_EDGE);
  gl.texStorage3D(gl.TEXTURE_3D, 1, gl[format], width, height, depth);
  gl.uniform1i(uniforms(name), unit);
}

// Fills a texture from a depth on with data that begin at a byte; returns the byte after the last one.
function fill(unit, { format, shape }, first, depth, data, start) {
  const [layout, type, View] = FORMATS[format];
  const [, height, width] = shape;
  const length = depth * height * width * (layout === "RGBA" ? 4 : 1);
  gl.activeTexture(gl.TEXTURE0 + unit);
  const texels = new View(data, start, length);
  gl.texSubImage3D(gl.TEXTURE_3D, 0, 0, 0, first, width, height, depth, gl[layout], gl[type], texels);
  return start + texels.byteLength;
}

function useProgram() {
  const program = gl.createProgram();
  const fragment = "#version 300 es\n" + PRECISIONS.join("") + document.getElementById("shader").textContent;
  for (const [type, source] of [[gl.VERTEX_SHADER, VERTEX_SHADER], [gl.FRAGMENT_SHADER, fragment]]) {
    const shader = gl.createShader(type);
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    if (!gl.getShaderParameter(shader, gl.COMPILE_STATUS)) throw new Error(gl.getShaderInfoLog(shader));
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  if (!gl.getProgramParameter(program, gl.LINK_STATUS)) throw new Error(gl.getProgramInfoLog(program));
  gl.useProgram(program);
  uniforms = (name) => gl.getUniformLocation(program, name);
}

function keepWhatFits() {
  const [, height, width] = scene.atlas[0].shape;
  const bytes = SIDE * height * width * (4 * scene.atlas.length - 2); // of a layer: densities have two
  if (matchMedia("(pointer: coarse)").matches) scene.layers.splice(Math.floor(MOBILE / bytes));
  for (const array of scene.atlas) array.shape[0] = SIDE * Math.max(scene.layers.length, 1);
}

async function prepare() {
  if (!gl) throw new Error("This page needs WebGL2, which the browser does not offer.");
  keepWhatFits();
  const limit = gl.getParameter(gl.MAX_3D_TEXTURE_SIZE);
  const textures = [...scene.arrays, ...scene.atlas];
  const longest = Math.max(...textures.flatMap((array) => array.shape));
  if (longest > limit) throw new Error(`Needs 3D textures ${longest} long; this browser has at most ${limit}.`);
  useProgram();
  bar.max = scene.bytes;
  gl.pixelStorei(gl.UNPACK_ALIGNMENT, 1);
  for (const [unit, array] of textures.entries()) addTexture(unit, array);
  if (gl.getError() === gl.OUT_OF_MEMORY) throw new Error("The graphics memory is too small for this scene.");
  for (const [unit, array] of scene.arrays.entries()) fill(unit, array, 0, array.shape[0], await load(array), 0);
}

// Replaces coarse blocks, layer by layer.
async function refine() {
  for (const [number, layer] of scene.layers.entries()) {
    const data = await load(layer);
    let start = 0;
    for (const [index, array] of scene.atlas.entries()) {
      start = fill(scene.arrays.length + index, array, number * SIDE, SIDE, data, start);
    }
    gl.uniform1i(uniforms("layers"), number + 1);
    sharp = false;
  }
  window.stop(); // the download of what a phone has no room for
}

// Draws the image of a camera: c2w as right, up, backward and position, one after the other; fx, fy, cx and cy.
function draw(c2w, intrinsics, width, height) {
  canvas.width = width;
  canvas.height = height;
  gl.viewport(0, 0, width, height);
  gl.uniformMatrix4x3fv(uniforms("c2w"), false, c2w);
  gl.uniform4fv(uniforms("intrinsics"), intrinsics);
  gl.uniform1f(uniforms("height"), height);
  gl.drawArrays(gl.TRIANGLES, 0, 3);
}

// The camera

const add = (a, b, factor = 1) => a.map((value, i) => value + factor * b[i]);
const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const cross = (a, b) => [0, 1, 2].map((i) => a[(i + 1) % 3] * b[(i + 2) % 3] - a[(i + 2) % 3] * b[(i + 1) % 3]);
const subtract = (a, b) => add(a, b, -1);

// Rotates a vector about a unit axis (Rodrigues).
function rotate(vector, axis, angle) {
  const across = add(vector.map((value) => value * Math.cos(angle)), cross(axis, vector), Math.sin(angle));
  return add(across, axis, dot(axis, vector) * (1 - Math.cos(angle)));
}

let view;
let changed;

function reset() {
  const [right, up, backward, position] = scene.c2w;
  view = { right, up, backward, position, pivot: scene.pivot };
  changed = true;
}

const distance = () => Math.hypot(...subtract(view.position, view.pivot));

// Turns the camera about a point, its own position or the pivot, but not past the vertical.
function turn(centre, yaw, pitch) {
  const tilted = dot(rotate(view.backward, view.right, pitch), scene.up);
  if (Math.abs(tilted) > 0.99 && Math.abs(tilted) > Math.abs(dot(view.backward, scene.up))) pitch = 0;
  const right = view.right;
  const turned = (vector) => rotate(rotate(vector, right, pitch), scene.up, yaw);
  for (const axis of ["right", "up", "backward"]) view[axis] = turned(view[axis]);
  for (const point of ["position", "pivot"]) view[point] = add(centre, turned(subtract(view[point], centre)));
  changed = true;
}

// Moves the camera and the pivot along the camera's axes.
function move(right, up, backward) {
  for (const point of ["position", "pivot"]) {
    for (const [axis, by] of [["right", right], ["up", up], ["backward", backward]]) {
      view[point] = add(view[point], view[axis], by);
    }
  }
  changed = true;
}

function zoom(factor) {
  view.position = add(view.pivot, subtract(view.position, view.pivot), factor);
  changed = true;
}

// Shows all that the first camera sees, whatever the shape of the window.
function intrinsicsOf(width, height) {
  const [fx, fy, cx, cy] = scene.intrinsics;
  const [w, h] = scene.size;
  const scale = Math.min(width / w, height / h);
  return [scale * fx, scale * fy, width / 2 + scale * (cx - w / 2), height / 2 + scale * (cy - h / 2)];
}

// The turn until somebody touches the page: around the scene, or to and fro where cameras saw one side of it only.

const TURN = 0.2; // radians per second, at most
const SWAY = 0.3; // radians to both sides
let turning = !matchMedia("(prefers-reduced-motion: reduce)").matches;
let turned = 0; // seconds

function turnSlowly(seconds) {
  turned += seconds;
  turn(view.pivot, TURN * seconds * (scene.around ? 1 : Math.cos((TURN / SWAY) * turned)), 0);
}

for (const touch of ["pointerdown", "wheel", "keydown"]) {
  addEventListener(touch, () => {
    turning = false;
    document.getElementById("hint").style.opacity = 0;
  });
}

// Controls

const pointers = new Map();
const keys = new Set();

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, event);
});

for (const end of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(end, (event) => pointers.delete(event.pointerId));
}

canvas.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (!before) return;
  pointers.set(event.pointerId, event);
  const [dx, dy] = [event.clientX - before.clientX, event.clientY - before.clientY];
  const other = [...pointers.values()].find((pointer) => pointer.pointerId !== event.pointerId);
  const pixel = distance() / intrinsicsOf(canvas.clientWidth, canvas.clientHeight)[0];
  if (other) {
    const apart = ({ clientX, clientY }) => Math.hypot(clientX - other.clientX, clientY - other.clientY);
    zoom(apart(before) / Math.max(apart(event), 1));
    move((-dx * pixel) / 2, (dy * pixel) / 2, 0);
  } else if (event.shiftKey || event.buttons !== 1) {
    move(-dx * pixel, dy * pixel, 0);
  } else {
    const angle = Math.PI / canvas.clientHeight;
    turn(view.pivot, -dx * angle, -dy * angle);
  }
});

canvas.addEventListener("contextmenu", (event) => event.preventDefault());
canvas.addEventListener(
  "wheel",
  (event) => {
    event.preventDefault();
    zoom(Math.exp(0.001 * event.deltaY * (event.deltaMode ? 30 : 1)));
  },
  { passive: false },
);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.code === "KeyR") reset();
  keys.add(event.code);
});
addEventListener("keyup", (event) => keys.delete(event.code));
addEventListener("blur", () => keys.clear());
addEventListener("resize", () => (changed = true));

function fly(seconds) {
  const held = (positive, negative) => keys.has(positive) - keys.has(negative);
  const [right, up, backward] = [held("KeyD", "KeyA"), held("KeyE", "KeyQ"), held("KeyS", "KeyW")];
  const speed = 0.5 * distance() * seconds;
  if (right || up || backward) move(speed * right, speed * up, speed * backward);
  const [yaw, pitch] = [held("ArrowLeft", "ArrowRight"), held("ArrowUp", "ArrowDown")];
  if (yaw || pitch) turn(view.position, yaw * seconds, pitch * seconds);
}

// Frames: fewer pixels while the camera moves if they take long, more once it has stopped.

const SLOW = 1 / 20;
const FAST = 1 / 45;
const PAUSE = 200; // milliseconds
const LEAST = 0.15; // of the pixels along each side
let share = turning ? LEAST : 1; // the first picture comes at once, and a turn soon has as many as it can
let sharp = false;
let moved = 0;
let previous = 0;

function drawView(share) {
  const scale = share * devicePixelRatio;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight].map((side) => Math.max(1, Math.round(scale * side)));
  const c2w = [view.right, view.up, view.backward, view.position].flat();
  draw(c2w, intrinsicsOf(width, height), width, height);
}

function frame(now) {
  const seconds = (now - previous) / 1000;
  previous = now;
  fly(Math.min(seconds, 0.1));
  if (turning) turnSlowly(Math.min(seconds, 0.1));
  if (changed) {
    // The first frame of a movement follows a pause, which tells nothing.
    const steady = (turning && turned > 0.2) || now - moved < PAUSE;
    if (steady && seconds > SLOW) {
      // Where the fewest pixels take this long, nobody wants to wait for a turn.
      if (share === LEAST && seconds > 5 * SLOW) turning = false;
      share = Math.max(Math.max(0.5, Math.sqrt(SLOW / seconds)) * share, LEAST);
    }
    if (steady && seconds < FAST) share = Math.min(1.05 * share, 1);
    drawView(share);
    changed = false;
    sharp = share === 1;
    moved = now;
  } else if (!sharp && now - moved > PAUSE) {
    // A picture that takes seconds would block the page, and some drivers would give up.
    drawView(Math.min(4 * share, 1));
    sharp = true;
  }
  requestAnimationFrame(frame);
}

canvas.addEventListener("webglcontextlost", () => {
  message.textContent = "The graphics driver has stopped: the scene may be too large for it. Reload to try again.";
});

async function start() {
  try {
    await prepare();
    reset();
    message.textContent = "";
    canvas.focus();
    requestAnimationFrame(frame);
    await refine();
    bar.remove();
  } catch (error) {
    bar.remove();
    const alone = location.protocol === "file:" && error instanceof TypeError;
    message.textContent = alone
      ? "This page has files beside it, which browsers load only from a server: run python -m http.server here."
      : error.message;
    throw error;
  }
}

start();
