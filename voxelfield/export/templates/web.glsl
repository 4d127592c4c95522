// One ray through a baked field, as in extension/fields/baked_render_ops.h, and its colour. The constants in capitals are
// written above by web_page.py. Axes of textures are reversed: z varies fastest in memory.
uniform usampler3D cells;   // distances to occupied cells
uniform isampler3D blocks;  // where each block is in the atlas, 10 bits per axis; -1 if not stored
uniform sampler3D log_density, values0, values1, values2, values3;  // the atlas, layers of which are there already
uniform sampler3D coarse_log_density, coarse_values0, coarse_values1, coarse_values2, coarse_values3;
uniform int layers;
uniform sampler3D weights;  // a row of each matrix per row of texels
#ifdef ENVIRONMENT
uniform sampler3D environment;  // a panorama, with one more column at each edge
#endif

uniform mat4x3 c2w;  // camera axes x right, y up, looking along -z
uniform vec4 intrinsics;
uniform float height;

out vec4 color;

// Points stay this far from the faces of their block, in voxels, beyond which the atlas has an unrelated block.
const float MARGIN = 1.0 / 1024.0;

float depth_of_all = 0.0, depth_of_kept = 0.0;  // optical depths, see extension/volume/keep_rule.h
float opacity = 0.0;
vec4 sums[TEXTURES];

bool stopped() { return exp(-depth_of_all) < MIN_TRANSMITTANCE; }

// Maps a point to texture coordinates of the atlas, or of the coarse one. Returns false if its block is not stored.
bool place(vec3 point, out vec3 placed, out bool fine) {
  ivec3 count = textureSize(blocks, 0).zyx;
  vec3 voxels = vec3(BLOCK_CELLS * count);
  vec3 u = clamp((point - LATTICE[0]) / (LATTICE[1] - LATTICE[0]) * voxels, vec3(0.0), voxels);
  ivec3 block = min(ivec3(u / float(BLOCK_CELLS)), count - 1);
  vec3 within = clamp(u - vec3(BLOCK_CELLS * block), MARGIN, float(BLOCK_CELLS) - MARGIN);
  int found = texelFetch(blocks, block.zyx, 0).r;
  if (found < 0) return false;
  ivec3 number = ivec3(found >> 20, found >> 10, found) & 1023;
  fine = number.x < layers;
  int cells_along = fine ? BLOCK_CELLS : COARSE_CELLS;
  vec3 vertex = vec3((cells_along + 1) * number) + within * float(cells_along) / float(BLOCK_CELLS);
  placed = (vertex.zyx + 0.5) / vec3(fine ? textureSize(log_density, 0) : textureSize(coarse_log_density, 0));
  return true;
}

#define READ(name, coarse) (fine ? textureLod(name, at, 0.0) : textureLod(coarse, at, 0.0))

void add_sample(vec3 point) {
  vec3 at;
  bool fine;
  if (!place(point, at, fine)) return;
  float thickness = exp(READ(log_density, coarse_log_density).r) * STEP;
  float alpha = 1.0 - exp(-thickness);
  if (exp(-depth_of_all) * alpha > MIN_WEIGHT) {
    float weight = exp(-depth_of_kept) * alpha;
    depth_of_kept += thickness;
    opacity += weight;
    sums[0] += weight * READ(values0, coarse_values0);
    sums[1] += weight * READ(values1, coarse_values1);
#if TEXTURES == 4
    sums[2] += weight * READ(values2, coarse_values2);
    sums[3] += weight * READ(values3, coarse_values3);
#endif
  }
  depth_of_all += thickness;
}

// Returns the distances at which a ray enters and leaves a box.
vec2 crossing(vec3 origin, vec3 direction, vec3 low, vec3 high) {
  vec3 a = (low - origin) / direction, b = (high - origin) / direction;
  vec3 first = min(a, b), last = max(a, b);
  return vec2(max(first.x, max(first.y, first.z)), min(last.x, min(last.y, last.z)));
}

// Adds the samples of a straight ray in warped coordinates, at near + (k + 0.5) STEP in occupied cells.
void march(vec3 origin, vec3 direction, float near, float far) {
  vec2 inside = crossing(origin, direction, CELLS[0], CELLS[1]);
  float end = min(far, inside.y);
  ivec3 last = textureSize(cells, 0).zyx - 1;
  vec3 scale = vec3(last + 1) / (CELLS[1] - CELLS[0]);
  vec3 start = (origin - CELLS[0]) * scale, slope = direction * scale;
  float k = max(0.0, ceil((inside.x - near) / STEP - 0.5));
  while (!stopped()) {
    float t = near + (k + 0.5) * STEP;
    if (!(t < end)) return;
    ivec3 cell = clamp(ivec3(floor(start + t * slope)), ivec3(0), last);
    int empty = int(texelFetch(cells, cell.zyx, 0).r);
    if (empty == 0) {
      add_sample(origin + t * direction);
      k += 1.0;
    } else {
      vec3 faces = vec3(cell) + mix(vec3(1 - empty), vec3(empty), greaterThan(slope, vec3(0.0)));
      vec3 exits = (faces - start) / slope;
      float leave = min(exits.x, min(exits.y, exits.z));
      // A little less, so that rounding does not skip a sample.
      k = max(k + 1.0, ceil((leave - near) / STEP - 0.501));
    }
  }
}

#ifdef NESTED_BOXES
// Marches through the pieces into which nested boxes cut a ray, see extension/rays/nested_boxes.h.
void march_pieces(vec3 origin, vec3 direction) {
  origin = (origin - CENTRE) / UNIT;
  int box = NESTED_BOXES - 1;
  vec3 half_edges = HALF_EDGES * pow(RATIO, float(box));
  vec2 outermost = crossing(origin, direction, -half_edges, half_edges);
  float t = max(NEAR, outermost.x), far = outermost.y;
  vec3 point = abs(origin + t * direction);
  while (box > 0 && all(lessThanEqual(point, HALF_EDGES * pow(RATIO, float(box - 1))))) --box;
  float local = 0.0, lattice = 0.0;
  while (t < far && !stopped()) {
    float scale = pow(RATIO, float(box));
    half_edges = HALF_EDGES * scale;
    float end = min(crossing(origin, direction, -half_edges, half_edges).y, far);
    int next = box + 1;
    if (box > 0) {
      half_edges /= RATIO;
      vec2 inner = crossing(origin, direction, -half_edges, half_edges);
      if (inner.x < inner.y && inner.y > t && inner.x < end) {
        end = max(inner.x, t);
        next = box - 1;
      }
    }
    float first = lattice, stop = local + max(end - t, 0.0) / scale;
    float passed = floor(stop / STEP);
    lattice = ((passed + 0.5) * STEP < stop ? passed + 1.0 : passed) * STEP;
    if (first < stop) {
      vec3 shifted = origin / scale + (t / scale - local) * direction;
      shifted.x += PITCH * float(box);
      march(shifted, direction, first, stop);
    }
    local = stop;
    t = next < NESTED_BOXES ? max(end, t) : far;
    box = next;
  }
}
#endif

#ifdef NDC
// Maps a point to normalised device coordinates, see the class NdcBox.
vec3 project(vec3 point) {
  vec3 away = point - NDC_CAMERA[3];
  float depth = max(-dot(NDC_CAMERA[2], away), NEAR);
  vec2 across = vec2(dot(NDC_CAMERA[0], away), dot(NDC_CAMERA[1], away)) / depth - NDC_CENTRE;
  return vec3(across / SLOPE, REACH * NEAR / depth);
}

// Marches along a ray from the near plane to the farthest depth, between which it stays straight.
void march_projected(vec3 origin, vec3 direction) {
  float start = -dot(NDC_CAMERA[2], origin - NDC_CAMERA[3]), slope = -dot(NDC_CAMERA[2], direction);
  slope = abs(slope) < 1e-7 ? 1e-7 : slope;
  float a = (NEAR - start) / slope, b = (NEAR * FARTHEST - start) / slope;
  float begin = max(min(a, b), 0.0), end = max(a, b);
  if (!(end > begin)) return;
  vec3 first = project(origin + begin * direction), whole = project(origin + end * direction) - first;
  march(first, whole / length(whole), 0.0, length(whole));
}
#endif

// Returns four columns of four rows, of which a row vector is multiplied with each.
mat4 rows_of_weights(int column, int row) {
  return mat4(texelFetch(weights, ivec3(column, row, 0), 0), texelFetch(weights, ivec3(column, row + 1, 0), 0),
              texelFetch(weights, ivec3(column, row + 2, 0), 0), texelFetch(weights, ivec3(column, row + 3, 0), 0));
}

// Returns the colour of the ray from its mean values and its direction, see the method shade of DeferredMLPDecoder and of
// HarmonicsDecoder.
vec3 shade(vec3 d) {
  vec4 layer[COLUMNS], outputs[COLUMNS];
  for (int i = 0; i < TEXTURES; ++i) layer[i] = LOW[i] + EXTENT[i] * sums[i] / max(opacity, 1e-6);
  vec3 diffuse = layer[0].rgb, dd = d * d;
  layer[TEXTURES] = vec4(0.28209479, -0.48860251 * d.y, 0.48860251 * d.z, -0.48860251 * d.x);
  layer[TEXTURES + 1] = vec4(1.09254843 * d.x * d.y, -1.09254843 * d.y * d.z, 0.31539157 * (3.0 * dd.z - 1.0),
                             -1.09254843 * d.x * d.z);
  layer[TEXTURES + 2] = vec4(0.54627422 * (dd.x - dd.y), -0.59004359 * d.y * (3.0 * dd.x - dd.y),
                             2.89061144 * d.x * d.y * d.z, -0.45704580 * d.y * (5.0 * dd.z - 1.0));
  layer[TEXTURES + 3] = vec4(0.37317633 * d.z * (5.0 * dd.z - 3.0), -0.45704580 * d.x * (5.0 * dd.z - 1.0),
                             1.44530572 * d.z * (dd.x - dd.y), -0.59004359 * d.x * (dd.x - 3.0 * dd.y));
  int columns = TEXTURES + 4, row = 0;
#ifdef HARMONICS
  for (int i = 0; i < 4 * TEXTURES; ++i) {
    vec4 sum = vec4(0.0);
    for (int j = 0; j < 4; ++j) {
      sum += layer[TEXTURES + j] * rows_of_weights(j, row);
    }
    diffuse += layer[i / 4][i % 4] * sum.rgb;
    row += 4;
  }
  return diffuse;
#else
  for (int number = 1; number <= LAYERS; ++number) {
    int rows = number < LAYERS ? WIDTH : 1;
    for (int i = 0; i < rows; ++i) {
      vec4 sum = vec4(0.0);
      for (int j = 0; j < columns; ++j) {
        sum += layer[j] * rows_of_weights(j, row);
      }
      outputs[i] = number < LAYERS ? max(sum, 0.0) : sum;
      row += 4;
    }
    layer = outputs;
    columns = rows;
  }
  return diffuse + layer[0].rgb;
#endif
}

// Returns the colour behind the field, see Environment.forward.
vec3 behind(vec3 d) {
#ifdef ENVIRONMENT
  float columns = float(textureSize(environment, 0).x - 2);
  vec2 at = 0.5 - vec2(atan(d.y, d.x) / 2.0, asin(clamp(d.z, -1.0, 1.0))) / 3.14159265;
  return textureLod(environment, vec3((at.x * columns + 1.0) / (columns + 2.0), at.y, 0.5), 0.0).rgb;
#else
  return BACKGROUND;
#endif
}

void main() {
  vec2 offset = (vec2(gl_FragCoord.x, height - gl_FragCoord.y) - intrinsics.zw) / intrinsics.xy;
  vec3 direction = normalize(c2w * vec4(offset.x, -offset.y, -1.0, 0.0)), origin = c2w[3];
  // Quotients stay finite.
  direction = mix(direction, vec3(1e-7), lessThan(abs(direction), vec3(1e-7)));
  for (int i = 0; i < TEXTURES; ++i) sums[i] = vec4(0.0);
#ifdef NESTED_BOXES
  march_pieces(origin, direction);
#elif defined(NDC)
  march_projected(origin, direction);
#else
  vec2 inside = crossing(origin, direction, BOX[0], BOX[1]);
  march(origin, direction, max(inside.x, 0.0), inside.y);
#endif
  vec3 emitted = opacity > 0.0 ? shade(direction) : vec3(0.0);
  color = vec4(opacity * emitted + (1.0 - opacity) * behind(direction), 1.0);
}
